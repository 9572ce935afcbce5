"""Parts of the mixture of experts that MindSpeed-RL imports."""
