"""How is a trained model adapted? Fine-tuning on conversations: all weights, low-rank adapters, or preferences."""
