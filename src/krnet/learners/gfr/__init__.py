"""GFR: generative feature replay. learner.py is the method, gan.py its generator."""
