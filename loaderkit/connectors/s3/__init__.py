"""Objects of a bucket, through s3torchconnector: `s3://bucket/prefix`.

connector.py    `S3Connector`
writes.py       its writing side: multipart uploads
requests.py     single requests, with retries, timeouts and renewal of credentials
client.py       the only module that imports s3torchconnector
uploads.py      the only module that imports botocore, for uploads in parts
config.py       where the bucket is: config, environment, AWS configuration
errors.py       translates the client's messages into errors of loaderkit, without secrets
"""

from loaderkit.connectors.s3.connector import S3Connector

__all__ = ["S3Connector"]
