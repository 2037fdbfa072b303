"""The torch half, behind the extra `train`: network, losses, data, training and sweeps."""
