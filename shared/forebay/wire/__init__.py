"""What crosses the network: plain values, ragged rows, frames, envelopes."""
