"""settings: what the user chose, checked and resolved, with saved plans."""
