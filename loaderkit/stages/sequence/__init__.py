"""Stages on sequences of tokens: packing documents into sequences of one length."""
