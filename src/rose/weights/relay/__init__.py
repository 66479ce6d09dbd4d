"""Where weight versions lie between the trainer and the workers: five relays behind one seam (`base.Relay`).

memory       in this process
filesystem   a folder; the default
http         our own server before a folder, for clusters that share no storage
object       S3, Google Cloud Storage, Azure (needs the extra `object`)
mooncake     Mooncake Store, on a trusted network (needs the extra `mooncake`)
"""
