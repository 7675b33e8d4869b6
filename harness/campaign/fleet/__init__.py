"""A campaign whose workers are actors of a Ray cluster. Ray is imported only where a fleet is used."""
