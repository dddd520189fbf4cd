"""The drafter network: fusion of taps, block-diffusion backbone, causal refiner, and the model that joins them."""
