"""Public bug reports of serving engines, each with what re-creates it here, or what is missing."""
