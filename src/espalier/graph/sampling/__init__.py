"""What does a step train on? The whole graph, drawn neighbourhoods, and ways of batching."""
