"""Vision-language models: CLIP's two towers, prompts, adapters, and the network that scores classes by their names."""
