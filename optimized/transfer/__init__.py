"""Moving requests from a prefill to a decode instance, and giving their memory back safely."""
