"""The command line: options, errors as exit statuses, progress and tables. All else lives beneath."""
