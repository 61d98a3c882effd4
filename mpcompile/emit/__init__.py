"""A rewritten graph becomes something to call. Most of the private torch is used here."""
