"""Objects of a bucket, through s3torchconnector: `s3://bucket/prefix`.

connector.py    `S3Connector`
requests.py     one request each: get, head, list, put, delete; the client, which belongs to one process
settings.py     where the bucket is: description, environment, AWS configuration
complaints.py   from what the client says to errors of loaderkit, without secrets
"""

from loaderkit.connectors.s3.connector import S3Connector

__all__ = ["S3Connector"]
