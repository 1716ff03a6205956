"""ir: the seven nouns that the pipeline passes on, and their verifiers. Nothing here uses torch."""
