"""superneurons: SuperNeurons: offload behind convolutions, cache, recompute by cost."""
