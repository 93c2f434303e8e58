"""What is asked of a graph? Nodes, links and graphs: losses, figures and answers."""
