"""Quantized rollouts: what a number format does to the weights and activations of the rollout
model.
"""
