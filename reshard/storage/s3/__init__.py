"""Object stores that speak S3's protocol: Amazon's, Huawei's OBS, MinIO, Ceph and others, with boto3."""
