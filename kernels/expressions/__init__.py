"""Expression trees of score_mod and mask_mod: build, check, differentiate, evaluate, trace."""
