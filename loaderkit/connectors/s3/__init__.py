"""Objects of a bucket, through s3torchconnector: `s3://bucket/prefix`.

connector.py    `S3Connector`
requests.py     one request each: get, head, list, put, delete; the client, which belongs to one process
client.py       the only module that imports s3torchconnector
config.py       where the bucket is: description, environment, AWS configuration
errors.py       from the client's messages to errors of loaderkit, without secrets
"""

from loaderkit.connectors.s3.connector import S3Connector

__all__ = ["S3Connector"]
