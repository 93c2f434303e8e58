"""What if something breaks? Policy and detection; whoever starts ranks asks here and acts (`launch.supervise`)."""
