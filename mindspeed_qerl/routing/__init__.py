"""Routing replay: the experts that the rollout chose, or an earlier pass of the trainer, chosen
again in training.
"""
