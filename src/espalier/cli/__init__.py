"""What can a user ask for? One file per verb of the command line."""
