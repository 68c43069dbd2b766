// What travels on the lease socket (`lease.sock`, SOCK_SEQPACKET): one JSON object a packet, with file descriptors
// beside it where said. The socket is the lease: its end of file, or the end of the peer's process, ends the session.
//
//   trainer -> misad  {"type":"hello","protocol":1,"client_version":"…","start_time":N}
//   misad -> trainer  {"type":"welcome","protocol":1,"token":"…","version":"…"}      or
//                     {"type":"refused","protocol":1,"error":"<sentence>"}           and the socket closes
//   misad -> trainer  {"type":"chunks","bytes":N,"chunk_bytes":N}   + 1 fd: the memfd of this session's chunks
//                                                                    (size N, sealed against shrinking and growing)
//   misad -> trainer  {"type":"disk","bytes":N,"block_bytes":N}     + 1 fd: the session's file, opened O_DIRECT|O_RDWR
//                     {"type":"host","bytes":N,"block_bytes":N}     in its place on an emulated device: a memfd
//
// `start_time` is field 22 of /proc/self/stat, so that a recycled pid is told from the trainer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace misa {

inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr char kLeaseSocketName[] = "lease.sock";
inline constexpr char kControlSocketName[] = "misad.sock";
inline constexpr char kTokenMetadata[] = "misa-session-token";
inline constexpr char kDefaultRuntimeDirectory[] = "/run/misa";
inline constexpr char kRuntimeDirectoryVariable[] = "MISA_RUNTIME_DIR";
inline constexpr size_t kMaxLeasePacketBytes = 4096;

}  // namespace misa
