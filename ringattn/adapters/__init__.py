"""Ways in for existing code: Hugging Face models and trainers, scaled_dot_product_attention, flash-attn."""
