"""The MindSpeed-RL engine: upstream's trainer and workers on Ascend NPUs, extended by subclassing,
never edited.
"""
