"""Graph mode is not emulated: keep torchair_graph off."""
