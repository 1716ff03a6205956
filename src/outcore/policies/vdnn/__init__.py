"""vdnn: vDNN: offload the inputs of layers, and choose convolution algorithms."""
