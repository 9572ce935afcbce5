"""What a run leaves behind: its directory, its metrics, its progress on the terminal, its report
and pictures. Nothing here needs an engine; only TensorBoard's writer needs torch.
"""
