/* What a predictor in a shared library of its own offers: plain C, so that neither side knows the other's compiler or
 * libraries. misad looks up MISA_PREDICTOR_ENTRY and calls it with its own version; a library of another one returns
 * NULL. */
#ifndef MISA_RUNTIME_PREDICT_PLUGIN_ABI_H_
#define MISA_RUNTIME_PREDICT_PLUGIN_ABI_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever anything below changes its meaning or its layout. */
#define MISA_PREDICTOR_ABI_VERSION 1u
#define MISA_PREDICTOR_ENTRY "misa_predictor_plugin"

/* Zero anywhere: the library's default. */
typedef struct misa_predictor_options {
  uint64_t seed;
  /* Different symbols that are told apart; those that come after them are one. */
  uint32_t most_symbols;
  /* Symbols between two rounds of training. */
  uint32_t train_every;
} misa_predictor_options;

/* Errors are sentences, cut to what `error_bytes` holds, with a zero at the end. Functions that take one return 0, or
 * another number and the sentence. An instance is used by one thread at a time; two instances need not be. Memory and
 * the time of a call are bounded whatever the symbols are. */
typedef struct misa_predictor_plugin_v1 {
  uint32_t abi_version;  /* MISA_PREDICTOR_ABI_VERSION */
  uint32_t struct_bytes; /* sizeof(misa_predictor_plugin_v1) */
  const char* name;      /* "lstm"; for people */
  /* NULL and a sentence where it cannot be made. */
  void* (*create)(const misa_predictor_options* options, char* error, size_t error_bytes);
  void (*destroy)(void* instance);
  /* In order; trains where it is due. */
  int (*observe)(void* instance, const uint64_t* symbols, size_t count, char* error, size_t error_bytes);
  /* *known is 0 where it has nothing to say. */
  int (*predict)(void* instance, uint64_t* symbol, int* known, char* error, size_t error_bytes);
} misa_predictor_plugin_v1;

typedef const misa_predictor_plugin_v1* (*misa_predictor_entry)(uint32_t abi_version);

#ifdef __cplusplus
}
#endif

#endif
