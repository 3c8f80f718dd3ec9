"""What is measured of finished models: losses, minimal pairs, probes, ranks; tables and figures."""
