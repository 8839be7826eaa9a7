# make            build bin/sluice
# make demo       set up, build, and run the smallest model end to end
# make test       set up, then all tests (check and check-e2e)
# make help       the other targets
CONFIG ?= release
B := build/$(CONFIG)
PREFIX ?= /usr/local
CFLAGS ?= -O2 -g
WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla -Werror
OPT.release :=
OPT.asan := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
OPT.tsan := -O1 -fsanitize=thread
$(if $(filter $(CONFIG),release asan tsan),,$(error unknown CONFIG=$(CONFIG)))
ARCH := $(shell $(CC) -dumpmachine)
# MUST follows CFLAGS, at link too: a caller cannot change results by accident.
MUST := -std=c11 -D_GNU_SOURCE -Iinclude -Isrc -ffp-contract=off -fno-fast-math -fvisibility=hidden -pthread -MMD -MP
PKGS := liburing jansson libpcre2-8 libcrypto
# Expanded only when something is compiled, so that `make deps` works before the packages are there.
PKG_CFLAGS = $(shell pkg-config --cflags $(PKGS))
PKG_LIBS = $(shell pkg-config --libs $(PKGS)) -lm

SRC := $(wildcard src/*.c src/base/*.c src/kernels/*.c src/store/*.c src/text/*.c src/model/*.c src/gen/*.c src/proof/*.c)
ifneq ($(filter x86_64%,$(ARCH)),)
SRC += $(wildcard src/kernels/x86/*.c)
endif
ifneq ($(filter aarch64%,$(ARCH)),)
SRC += $(wildcard src/kernels/arm/*.c)
endif
OBJ := $(SRC:%.c=$(B)/%.o)
CMD_OBJ := $(patsubst %.c,$(B)/%.o,$(wildcard cmd/*.c))
LIB := $(B)/libsluice.a

all: bin/sluice

bin/sluice: $(B)/sluice
	@mkdir -p bin
	cp $< $@

$(B)/sluice: $(CMD_OBJ) $(LIB)
	$(CC) $(CFLAGS) $(OPT.$(CONFIG)) $(MUST) $(LDFLAGS) $^ $(PKG_LIBS) -o $@

$(LIB): $(OBJ)
	@rm -f $@
	$(AR) rcs $@ $^

$(B)/src/kernels/x86/avx2.o: ISA := -mavx2 -mfma -mf16c
$(B)/src/kernels/x86/avx512.o: ISA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
$(B)/%.o: %.c Makefile
	@mkdir -p $(@D)
	$(CC) $(WARN) $(CFLAGS) $(OPT.$(CONFIG)) $(ISA) $(PKG_CFLAGS) $(MUST) -c $< -o $@

clean:
	rm -rf build bin

-include $(OBJ:.o=.d) $(CMD_OBJ:.o=.d)
.PHONY: all clean
.DELETE_ON_ERROR:

# ---- tests: each tests/<kind>/test_*.c is a program of its own ------------------------------
TEST_SRC := $(wildcard tests/unit/test_*.c tests/kernels/test_*.c tests/golden/test_*.c)
TEST_BIN := $(TEST_SRC:%.c=$(B)/%)
tests: $(TEST_BIN)
$(B)/tests/%: $(B)/tests/%.o $(LIB)
	$(CC) $(CFLAGS) $(OPT.$(CONFIG)) $(MUST) $(LDFLAGS) $^ $(PKG_LIBS) -o $@
$(B)/tests/%.o: MUST += -I.
-include $(TEST_SRC:%.c=$(B)/%.d)
.PHONY: tests
.SECONDARY:
