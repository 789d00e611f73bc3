"""HiSparse: full KV on the host, and a hot buffer of device rows for each running request."""
