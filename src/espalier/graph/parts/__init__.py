"""How is a graph cut over ranks? Its parts, the rows that cross between them, and folders of parts."""
