"""Wire schemas of the gateway, shared by its clients and its routes. Importing them loads neither."""
