"""What a training step of each network takes, without running it."""
