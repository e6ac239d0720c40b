"""The decoding engine as a service over HTTP."""
