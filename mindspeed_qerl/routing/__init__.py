"""Routing replay: the experts that the rollout chose, chosen again in training."""
