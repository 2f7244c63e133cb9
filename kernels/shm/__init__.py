"""The one-sided protocols between processes of one host, over shared memory."""
