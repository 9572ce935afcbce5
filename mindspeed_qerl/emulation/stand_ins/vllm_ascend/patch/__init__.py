"""MindSpeed-RL imports the two modules for their effect (vllm_engine.py:144); here the platform has done everything
already."""
