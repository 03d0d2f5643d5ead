"""The network model beside measured collectives, and what its constants are fitted to."""
