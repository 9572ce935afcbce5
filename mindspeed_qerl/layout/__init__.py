"""Which parallel layouts exist for a model on a number of ranks, by what rules, and what each rank
must hold. Bare Python.
"""
