"""One self-contained HTML page from any number of result files: tables and pictures, no network."""
