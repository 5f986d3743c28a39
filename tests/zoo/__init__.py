"""Real classes of diffusers and transformers, made tiny by a rule, under parking."""
