"""AQN: stage-wise Gaussian noise on the RMSNorm weights of the rollout model (QeRL, arXiv
2510.11696).

`schedule` says how much noise at which step, `targets` says on which norms, `injector` puts it on,
reports it and takes it off. `schedule` and the target checks need no torch, so that a config can be
checked before anything heavy is imported.
"""
