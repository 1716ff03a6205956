"""The seven nouns and their verifiers. Nothing here knows of torch."""
