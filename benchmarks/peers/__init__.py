"""smq beside Apache Kafka, etcd and NATS: the same load, the same machine, three nodes each."""
