"""Cache layers: codecs, streams of tokens, packed records, and the handle attention reads them through."""
