"""Whether adapters, peers and attnfuzz itself are in order."""
