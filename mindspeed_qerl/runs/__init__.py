"""What a run leaves behind: its directory, its metrics, its progress on the terminal, its report and pictures.

Importing this package, and reading a run with it, needs nothing but the standard library; config files need PyYAML,
pictures matplotlib, tables rich. Only TensorBoard's writer needs torch.
"""
