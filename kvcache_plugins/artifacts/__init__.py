"""File formats that calibration writes and backends read: safetensors and json, versioned, never pickles."""
