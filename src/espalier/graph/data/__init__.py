"""What is a graph read from? Tables, arrays, data sets and folders, checked and divided."""
